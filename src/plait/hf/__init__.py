"""Hugging Face: plait's models as transformers models. Importing this module registers them.

    import plait.hf
    model = transformers.AutoModelForCausalLM.from_pretrained("runs/NAME/checkpoints/step-00001000")

A directory that plait or a training run wrote loads there, and one that save_pretrained wrote loads with plait.load.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from plait.hf.cache import PlaitCache
from plait.hf.config import PlaitConfig
from plait.hf.model import PlaitForCausalLM

AutoConfig.register(PlaitConfig.model_type, PlaitConfig, exist_ok=True)
AutoModelForCausalLM.register(PlaitConfig, PlaitForCausalLM, exist_ok=True)

__all__ = ["PlaitCache", "PlaitConfig", "PlaitForCausalLM"]

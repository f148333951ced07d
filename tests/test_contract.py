"""The mixer contract, through whole models: full = chunked = decoded = packed = padded = alone, whatever the program.

A new mixer or feature joins in contract/configs.py. The mutations show that the test can fail.
"""

from __future__ import annotations

import os

import pytest
from contract.mutations import MUTATIONS, mutated
from contract.program import Case, cases, check
from contract.tools import examples
from hypothesis import HealthCheck, Phase, given, settings

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
EXAMPLES = int(os.environ.get("PLAIT_CONTRACT_EXAMPLES", "3000"))
"""of the thorough run"""


@examples(250)
@given(cases())
def test_contract(case: Case):
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(max_examples=EXAMPLES, derandomize=False, print_blob=True, **QUIET)
@given(cases(6))
def test_contract_thoroughly(case: Case):
    check(case)


@pytest.mark.parametrize("name", MUTATIONS)
def test_contract_catches(name: str):
    @settings(max_examples=600, derandomize=True, phases=[Phase.generate], **QUIET)
    @given(cases(among=MUTATIONS[name][0]))
    def contract(case: Case):
        check(case)

    with mutated(name), pytest.raises((AssertionError, RuntimeError, IndexError)):
        contract()

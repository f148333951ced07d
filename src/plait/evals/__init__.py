"""Scores of models on tasks. `suites` names them; each suite imports what it runs on only when it runs."""

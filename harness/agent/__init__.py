"""The agent: a loop in which a model writes programs and makes tools, within budgets and approvals."""

"""Commands that explain: help, man page, completion, doctor, policies, benchmarks."""

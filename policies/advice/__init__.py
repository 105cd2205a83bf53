"""Advice: texts for people about policies, such as hints after a refusal and lessons of a run."""

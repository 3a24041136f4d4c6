"""What a run does so that it fits in memory: the decision, its seconds, its check, its repair."""

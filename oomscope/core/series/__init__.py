"""Per-step series: trends, leak tests, steps to out-of-memory."""

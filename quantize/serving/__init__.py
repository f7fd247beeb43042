"""Real vLLM: processes, counters, acceptance, and what vLLM needs from us to serve a pair."""

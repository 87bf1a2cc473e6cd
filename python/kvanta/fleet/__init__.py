"""A simulator of replicas that serve a trace: hit rates, times to the first token, machines needed."""

"""Several models at one address: each in a process of its own, loaded when a request names it."""

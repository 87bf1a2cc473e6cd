"""Load for a server or an engine: what to send and when, what came back and how fast, tables and pictures of it.

workload (synthetic lengths, or a trace) -> runner (when) -> client (one request over HTTP) -> records -> summary.
Nothing here needs the compiled library, and everything but the client serves a load without HTTP as well.
"""

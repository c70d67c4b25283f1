"""The HTTP front end: validates, tokenizes, streams; decides nothing about placement and holds no KV.

Its own process, torch-free. It reaches the core only through `client.CoreLink`. Invariant: whatever a client sends,
it gets one well-formed answer, and a request that leaves early is abandoned at the core.
"""

"""Moving KV blocks between the pools of two workers, safely.

Owns pool memory, generations, leases, links and their self-test; imports no torch and decides nothing about requests.
Invariant: bytes count as read only if their generations and the owner's epoch still hold after the last byte arrived.
"""

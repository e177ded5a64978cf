"""qtool and its peers side by side: what ``benchmarks/peers.py`` is made of.

Every engine works in a process and an environment of its own (``worker``), so the modules that
a worker imports need nothing but the standard library, numpy and their engine.
"""

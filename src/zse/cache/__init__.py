"""The KV cache on the host side: page accounting. Device layout is in cache/layout.py."""

"""kvactors: independent asyncio actors that keep a tiered KV cache and tell external indexes what this node holds."""

"""A soak: random requests on caches whose limits are tiny, with every tier and every sink, verified
byte for byte."""

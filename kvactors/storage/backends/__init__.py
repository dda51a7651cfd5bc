"""Storage back ends behind one contract."""

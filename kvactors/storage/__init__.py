"""The storage tier: readers, writers and the back ends they drive."""

"""Stores: collections of tables, in this process or on a cluster."""

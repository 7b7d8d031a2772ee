"""Directories of files that are written once, local or on a file system that fsspec supports."""

"""Directories of files that are written once, on this machine or wherever fsspec reaches."""

"""Starting the processes of a cluster, and ending them together."""

"""What goes between the processes of a cluster, and in which form.

    map.py        which endpoint owns which slots
    messages.py   control messages: typed, versioned

Nothing here is imported by ``import shoal``.
"""

"""What goes between the processes of a cluster, and in which form.

    map.py        which endpoint owns which slots
    messages.py   control messages: typed, versioned
    loop.py       data loops: endpoints of a server that serve without Python
    backend.py    where pyzmq's libzmq is
    curve.py      keys: who may speak, and how one proves who one is

Nothing here is imported by ``import shoal``.
"""

"""``python -m shoal.lineage.worker PART RANK``: the process of a worker that makes a part of a fit again (again.py)."""

import sys

import msgspec

from shoal.lineage.again import Part, work

if __name__ == "__main__":
    work(msgspec.json.decode(sys.argv[1], type=Part), int(sys.argv[2]))

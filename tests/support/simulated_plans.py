"""Plans of simulated schedules."""

from sim.schedules import ROUGH, Plan

MODES = {"bsp": ("bsp", 0), "ssp(0)": ("ssp", 0), "ssp(1)": ("ssp", 1), "ssp(3)": ("ssp", 3), "asp": ("asp", 0)}


MOVES = {
    "moving slots": {"weather": ROUGH, "moves": 4, "endpoints": 3},
    "moving slots and deaths": {"weather": ROUGH, "moves": 4, "endpoints": 3, "deaths": 1},
}


def plan_of(mode, fields):
    name, staleness = MODES[mode]
    return Plan(mode=name, staleness=staleness, **fields)

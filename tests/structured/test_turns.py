"""Whose grammar is compiled next."""

import random

from zse.structured.turns import MAX_CHECKS, MAX_WAITING, OWN_CHECKS, Turns


def test_one_slot_is_left_for_others():
    turns = Turns()
    for number in range(10):
        assert turns.add("a", number)
    assert [turns.next() for _ in range(3)] == [0, 1, None] and OWN_CHECKS == 2
    assert turns.add("b", 10) and turns.next() == 10 and turns.next() is None and MAX_CHECKS == 3


def test_tenants_take_turns_and_nobody_starves():
    draw, turns = random.Random(3), Turns()
    left = {
        tenant: [100 * index + n for n in range(size)]
        for index, (tenant, size) in enumerate(zip("abcd", (60, 40, 5, 1), strict=True))
    }
    owner = {number: tenant for tenant, numbers in left.items() for number in numbers}
    for tenant, numbers in left.items():
        for number in numbers:
            turns.add(tenant, number)
    running, begun = [], []
    while len(begun) < len(owner):
        while (number := turns.next()) is not None:
            running.append(number)
            begun.append(number)
            assert len(running) <= MAX_CHECKS and sum(owner[n] == owner[number] for n in running) <= OWN_CHECKS
        turns.done(owner[running.pop(draw.randrange(len(running)))])
    for tenant, numbers in left.items():
        assert [number for number in begun if owner[number] == tenant] == numbers, "in order"
    assert begun.index(left["d"][0]) < 4 and begun.index(left["c"][-1]) < 4 * 5 + 2


def test_a_tenant_has_a_bound_of_its_own():
    turns = Turns()
    assert all(turns.add("a", number) for number in range(MAX_WAITING)) and not turns.add("a", MAX_WAITING)
    assert turns.add("b", MAX_WAITING)
    assert turns.remove("a", 5) and not turns.remove("a", 5) and turns.add("a", 1000)

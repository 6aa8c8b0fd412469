"""The table of all ranks' sites."""

from guardbit.monitor.measure.plan import KnownSite, joined_tables


def table(*names, first_layer=0):
    return [KnownSite(i, first_layer + i, name, 2, False, 1) for i, name in enumerate(names)]


def placed(sites):
    return [(site.name, site.place, site.layer) for site in sites]


def test_stages_that_number_their_layers_from_0_each_are_counted_on():
    joined = joined_tables([table("a.0", "a.1"), table("b.0")])
    assert placed(joined) == [("a.0", 0, 0), ("a.1", 1, 1), ("b.0", 2, 2)]


def test_stages_that_know_their_layers_keep_them():
    joined = joined_tables([table("h.0"), table("h.1", "h.2", first_layer=1)])
    assert placed(joined) == [("h.0", 0, 0), ("h.1", 1, 1), ("h.2", 2, 2)]


def test_a_site_of_two_ranks_is_there_once():
    joined = joined_tables([table("h.0", "h.1"), table("h.0", "h.1")])
    assert placed(joined) == [("h.0", 0, 0), ("h.1", 1, 1)]

"""The colours of figures, reports and the live page, in one place.

The colours of lines are Okabe and Ito's, which people with any colour vision can distinguish. In
grey, line styles and direct labels do; the ramp of the maps darkens steadily.
"""

INK = "#20242c"
PAPER = "#ffffff"
CONTEXT = "#8c939e"
HIGHLIGHTS: tuple[tuple[str, str], ...] = (("#d55e00", "-"), ("#0072b2", "--"), ("#009e73", "-."))
#: What became of a run; amber for all that is neither good nor lost.
OUTCOME_COLOURS = {
    **dict.fromkeys(("healthy", "saved"), "#00664a"),
    **dict.fromkeys(("warning", "alarmed", "switched", "unclear"), "#b84a00"),
    **dict.fromkeys(("lost", "learning-rate"), "#a3260d"),
}
#: Ramp of the maps, from usual to diverging; its luminance falls steadily, so it reads in grey.
HEAT_STOPS = ("#f1f2f4", "#f6cf9a", "#ec9336", "#c04a00", "#6b1f00", "#2b0a00")
#: The same on dark paper: from usual, which is dark, to diverging, which shines.
HEAT_STOPS_DARK = ("#23272e", "#5a3413", "#a85410", "#f08a2c", "#ffd08a", "#fff6e0")
#: The ramp's end in the model map, in times a head's baseline: more makes no difference.
MOST_EXCESS = 100.0

"""The colours of figures, reports and the live page, in one place.

Colours of lines are Okabe and Ito's, told apart by people with any colour vision; line styles and
direct labels tell lines apart in grey, and the ramp of the maps darkens steadily.
"""

INK = "#20242c"
PAPER = "#ffffff"
CONTEXT = "#8c939e"
HIGHLIGHTS: tuple[tuple[str, str], ...] = (
    ("#d55e00", "-"),
    ("#0072b2", "--"),
    ("#009e73", "-."),
)
#: Ramp of the maps, from normal to ill; its luminance falls steadily, so that it reads in grey.
HEAT_STOPS = ("#f1f2f4", "#f6cf9a", "#ec9336", "#c04a00", "#6b1f00", "#2b0a00")
#: The ramp's end in the model map, in times a head's normal: more makes no difference.
MOST_EXCESS = 100.0

"""One judgement of a run, which every view shows."""

from guardbit.judgement.evidence import AT_RISK, HARDLY_AT_RISK, SHARES, Evidence
from guardbit.judgement.facts import (
    OFF,
    PRECISE,
    RECOVERED,
    is_place,
    nothing_to_correct,
    severities,
)
from guardbit.judgement.judging import Ended, Judgement, cause_by, cause_of, judge, verdict_of

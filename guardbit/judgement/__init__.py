"""One judgement of a run, which every view shows."""

from guardbit.judgement.evidence import AT_RISK as AT_RISK
from guardbit.judgement.evidence import HARDLY_AT_RISK as HARDLY_AT_RISK
from guardbit.judgement.evidence import SHARES as SHARES
from guardbit.judgement.evidence import Evidence as Evidence
from guardbit.judgement.facts import OFF as OFF
from guardbit.judgement.facts import PRECISE as PRECISE
from guardbit.judgement.facts import RECOVERED as RECOVERED
from guardbit.judgement.facts import is_place as is_place
from guardbit.judgement.facts import nothing_to_correct as nothing_to_correct
from guardbit.judgement.facts import severities as severities
from guardbit.judgement.judging import Ended as Ended
from guardbit.judgement.judging import Judgement as Judgement
from guardbit.judgement.judging import cause_by as cause_by
from guardbit.judgement.judging import cause_of as cause_of
from guardbit.judgement.judging import judge as judge
from guardbit.judgement.judging import verdict_of as verdict_of

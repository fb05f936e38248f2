"""What a program may ask for: descriptors, stream effects, their derivation and their law.  Knows no backend."""

if __name__ != "mla_fx.effects":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.effects', not {__name__!r}")

from mla_fx.effects import ops as ops
from mla_fx.effects.aval import AXES as AXES
from mla_fx.effects.aval import Aval as Aval
from mla_fx.effects.aval import ShapeError as ShapeError
from mla_fx.effects.check import LawError as LawError
from mla_fx.effects.check import Violation as Violation
from mla_fx.effects.check import check as check
from mla_fx.effects.check import violations as violations
from mla_fx.effects.cost import Cost as Cost
from mla_fx.effects.cost import cost as cost
from mla_fx.effects.group import Group as Group
from mla_fx.effects.op import Op as Op
from mla_fx.effects.orchestration import Orchestration as Orchestration
from mla_fx.effects.passes import Found as Found
from mla_fx.effects.passes import Pass as Pass
from mla_fx.effects.passes import inline as inline
from mla_fx.effects.passes import rewrite as rewrite
from mla_fx.effects.program import MAIN as MAIN
from mla_fx.effects.program import Drop as Drop
from mla_fx.effects.program import Effect as Effect
from mla_fx.effects.program import Keep as Keep
from mla_fx.effects.program import Launch as Launch
from mla_fx.effects.program import Program as Program
from mla_fx.effects.program import Record as Record
from mla_fx.effects.program import Stage as Stage
from mla_fx.effects.program import Wait as Wait
from mla_fx.effects.schedule import ScheduleError as ScheduleError
from mla_fx.effects.schedule import schedule as schedule
from mla_fx.effects.step import Equation as Equation
from mla_fx.effects.step import Input as Input
from mla_fx.effects.step import Step as Step
from mla_fx.effects.step import StepError as StepError
from mla_fx.effects.step import Value as Value
from mla_fx.effects.step import bind as bind
from mla_fx.effects.step import on_host as on_host
from mla_fx.effects.step import parameters as parameters
from mla_fx.effects.step import scope as scope
from mla_fx.effects.step import staged as staged
from mla_fx.effects.step import trace as trace
from mla_fx.effects.validate import InputError as InputError

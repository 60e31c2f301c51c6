"""A parser for XLA's programs as text (HLO): instructions, loops and their trip counts.

XLA's own cost analysis counts the body of each loop once. Right after the SPMD partitioner, no pass
has written `known_trip_count` yet, so the trip count is derived from the loop: the start of its
counter, the step, and the limit.
Source: https://openxla.org/xla/operation_semantics; text format of jaxlib 0.10 to 0.12.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

# All other types (pred, s8, u8, eight-bit floats) take one byte.
ITEM_BYTES = {
  'bf16': 2,
  'f16': 2,
  's16': 2,
  'u16': 2,
  'f32': 4,
  's32': 4,
  'u32': 4,
  'f64': 8,
  's64': 8,
  'u64': 8,
  'c64': 8,
  'c128': 16,
}
# Instructions that return the value of their first operand.
SAME_VALUE = ('copy', 'bitcast', 'convert', 'reshape')

_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = ')
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\]')
_CALLED = re.compile(
  r'\b(?:to_apply|calls|called_computations?|true_computation|false_computation|'
  r'branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))'
)


@dataclasses.dataclass(frozen=True)
class Array:
  """The type and shape of an array on one device."""

  dtype: str
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    return self.size * ITEM_BYTES.get(self.dtype, 1)

  def __str__(self) -> str:
    return f'{self.dtype}[{" x ".join(map(str, self.shape))}]'


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: unique in the module.
    opcode: 'all-gather', 'dot', 'while' and so on.
    arrays: the arrays that it returns; several for a tuple.
    operands: names of instructions, or the literal of a constant.
    rest: the text of its attributes.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  rest: str

  def attribute(self, name: str) -> Optional[str]:
    """Returns the text of `name=VALUE` or `name={...}`, without braces; None if absent."""
    found = re.search(rf'\b{name}=(?:\{{([^}}]*)\}}|([^\s,]+))', self.rest)
    if found is None:
      return None
    return found.group(2) if found.group(1) is None else found.group(1)

  def numbers(self, name: str) -> tuple[int, ...]:
    """Returns an attribute such as dimensions={0,1}; () if absent."""
    return tuple(int(n) for n in re.findall(r'\d+', self.attribute(name) or ''))

  @property
  def kernel(self) -> str:
    """Name of the GPU kernel that XLA generates for a fusion; equal fusions share one kernel."""
    found = re.search(r'\bdeduplicated_name="([^"]*)"', self.rest)
    return re.sub(r'\W', '_', found.group(1) if found else self.name)

  @property
  def op_name(self) -> str:
    found = re.search(r'\bop_name="([^"]*)"', self.rest)
    return found.group(1) if found else ''


@dataclasses.dataclass
class Computation:
  """A function of the module: its instructions by name, in program order."""

  name: str
  instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
  root: str = ''

  @functools.cached_property
  def users(self) -> Mapping[str, list[Instruction]]:
    """Name of an instruction -> the instructions that use it as an operand."""
    found: dict[str, list[Instruction]] = {}
    for instruction in self.instructions.values():
      for operand in instruction.operands:
        found.setdefault(operand, []).append(instruction)
    return found

  def origin(self, name: str) -> Optional[Instruction]:
    """Returns the instruction that computed `name`, looking through copies; None for a literal."""
    instruction = self.instructions.get(name)
    while instruction is not None and instruction.opcode in SAME_VALUE:
      instruction = self.instructions.get(instruction.operands[0])
    return instruction


@dataclasses.dataclass(frozen=True)
class Visit:
  """An instruction on one of the call paths that reach it.

  Attributes:
    computation, instruction: the instruction and the computation that contains it.
    count: how often it runs, the product of `trip_counts`.
    trip_counts: trip counts of the loops around it, outermost first.
    in_branch: it is in a branch of a conditional, or in a loop of one iteration or none, and may
      not run at all.
    unknown_count: a loop around it has an unknown length, which counts as 1.
    op_name: its path in the traced Python program, after the path of its callers.
  """

  computation: Computation
  instruction: Instruction
  count: int
  trip_counts: tuple[int, ...]
  in_branch: bool
  unknown_count: bool
  op_name: str


@dataclasses.dataclass(frozen=True)
class Module:
  """A program: its computations, the name of the first to run, and stack frame id -> source."""

  computations: Mapping[str, Computation]
  entry: str
  sources: Mapping[int, str]

  def walk(self) -> Iterator[Visit]:
    """Yields every reachable instruction, once per call path."""
    yield from self._walk(self.entry, (), False, False, '')

  def _walk(
    self, name: str, trips: tuple[int, ...], in_branch: bool, unknown: bool, prefix: str
  ) -> Iterator[Visit]:
    computation = self.computations[name]
    for instruction in computation.instructions.values():
      # Names inside a shard_map are relative to it.
      own = instruction.op_name
      path = own if not prefix or own.startswith('jit(') else '/'.join(filter(None, (prefix, own)))
      yield Visit(computation, instruction, math.prod(trips), trips, in_branch, unknown, path)
      if instruction.opcode == 'while':
        count, body = self.trip_count(computation, instruction), self.body(instruction)
        if count is None and self._runs_at_most_once(instruction):
          yield from self._walk(body, trips, True, unknown, prefix)
        else:
          yield from self._walk(
            body, (*trips, count or 1), in_branch, unknown or count is None, prefix
          )
      elif instruction.opcode in ('call', 'conditional', 'fusion', 'async-start'):
        inner = path if instruction.opcode == 'call' else prefix
        for called in self.called(instruction):
          yield from self._walk(
            called, trips, in_branch or instruction.opcode == 'conditional', unknown, inner
          )

  def called(self, instruction: Instruction) -> list[str]:
    """Returns the computations that a call, fusion or conditional runs."""
    names = [
      name.strip().lstrip('%')
      for found in _CALLED.finditer(instruction.rest)
      for name in (found.group(1) or found.group(2)).split(',')
    ]
    return [name for name in names if name in self.computations]

  def body(self, loop: Instruction) -> str:
    """Returns the name of a while's body."""
    return (loop.attribute('body') or '').lstrip('%')

  def trip_count(self, computation: Computation, loop: Instruction) -> Optional[int]:
    """Returns the iterations of `loop`, a while in `computation`; None if unknown."""
    known = re.search(r'known_trip_count\W+n\W+(\d+)', loop.rest)
    if known:
      return int(known.group(1))
    condition = _Frame(self.computations[(loop.attribute('condition') or '').lstrip('%')])
    frame, compare = self._origin(condition, condition.computation.root)
    if compare is None or compare.opcode != 'compare':
      return None
    left, right = (self._origin(frame, name)[1] for name in compare.operands)
    direction = compare.attribute('direction')
    if left is not None and left.opcode == 'constant':  # n > i
      left, right, direction = right, left, {'GT': 'LT', 'GE': 'LE'}.get(direction or '')
    end = _constant(right)
    if (
      end is None
      or left is None
      or left.opcode != 'get-tuple-element'
      or (direction not in ('LT', 'LE'))
    ):
      return None
    index = left.numbers('index')[0]
    start = _constant(self._element(_Frame(computation), loop.operands[0], index)[1])
    step = self._growth(self.computations[self.body(loop)], index)
    if start is None or not step or step < 0:
      return None
    return max(0, -(-(end + (direction == 'LE') - start) // step))

  def _runs_at_most_once(self, loop: Instruction) -> bool:
    """Returns whether `loop` runs while a carried value is true, which its body makes false."""
    condition = self.computations[(loop.attribute('condition') or '').lstrip('%')]
    _, value = self._origin(_Frame(condition), condition.root)
    if value is None or value.opcode != 'get-tuple-element':
      return False
    body = self.computations[self.body(loop)]
    _, after = self._element(_Frame(body), body.root, value.numbers('index')[0])
    return after is not None and after.opcode == 'constant' and after.operands == ('false',)

  def _growth(self, body: Computation, index: int) -> Optional[int]:
    """Returns the increment of element `index` of the carried tuple per iteration of `body`."""
    frame, add = self._element(_Frame(body), body.root, index)
    if add is None or add.opcode != 'add':
      return None
    counter, step = None, None
    for _, operand in (self._origin(frame, name) for name in add.operands):
      if operand is not None and operand.opcode == 'get-tuple-element':
        counter = operand.numbers('index')[0]
      else:
        step = _constant(operand)
    return step if counter == index else None

  def _origin(self, frame: '_Frame', name: str) -> tuple['_Frame', Optional[Instruction]]:
    """Returns the instruction that computed `name`, looking through copies and fusions."""
    found = frame.computation.origin(name)
    if found is not None and found.opcode == 'fusion' and len(found.arrays) == 1:
      [inner] = self.called(found)
      return self._origin(
        _Frame(self.computations[inner], found, frame), self.computations[inner].root
      )
    if found is not None and found.opcode == 'parameter' and frame.fusion is not None:
      return self._origin(frame.caller, frame.fusion.operands[int(found.operands[0])])
    return frame, found

  def _element(
    self, frame: '_Frame', name: str, index: int
  ) -> tuple['_Frame', Optional[Instruction]]:
    """Returns the origin of element `index` of the tuple `name`."""
    frame, made = self._origin(frame, name)
    if made is None or made.opcode != 'tuple':
      return frame, None
    return self._origin(frame, made.operands[index])

  def source(self, instruction: Instruction) -> str:
    """Returns 'path/file.py:line' of the instruction's Python code; '' if unknown."""
    frame = re.search(r'\bstack_frame_id=(\d+)', instruction.rest)
    if frame:
      return self.sources.get(int(frame.group(1)), '')
    file = re.search(r'\bsource_file="([^"]*)"(?:\s+source_line=(\d+))?', instruction.rest)
    return f'{file.group(1)}:{file.group(2)}' if file else ''


@dataclasses.dataclass(frozen=True)
class _Frame:
  """A computation, and the fusion that runs it: `fusion`, an instruction of the frame `caller`."""

  computation: Computation
  fusion: Optional[Instruction] = None
  caller: Optional['_Frame'] = None


def _constant(instruction: Optional[Instruction]) -> Optional[int]:
  if instruction is None or instruction.opcode != 'constant':
    return None
  literal = instruction.operands[0] if instruction.operands else ''
  return int(literal) if re.fullmatch(r'-?\d+', literal) else None


@functools.lru_cache(maxsize=1)  # a plan reads one module in five ways
def parse(text: str) -> Module:
  """Returns the parsed module of `lowered.as_text('hlo')`, a dump, or `compiled.as_text()`.

  Callers share the module, and must not change it.

  Raises:
    ValueError: the text has no entry computation.
  """
  computations: dict[str, Computation] = {}
  entry, current = '', None
  for line in text.splitlines():
    if not line.startswith(' '):
      header = _HEADER.match(line)
      if header:
        current = computations[header.group(2)] = Computation(header.group(2))
        entry = header.group(2) if header.group(1) else entry
      elif line.startswith('}'):
        current = None
    elif current is not None:
      found = _INSTRUCTION.match(line)
      if found:
        instruction = _instruction(found.group(2), re.sub(r'/\*.*?\*/', '', line[found.end() :]))
        for operand in instruction.operands:
          if '#' in operand and operand not in current.instructions:
            current.instructions[operand] = _element_instruction(current, operand)
        start = current.instructions.get(next(iter(instruction.operands), ''))
        if instruction.opcode == 'fusion-done' and start is not None:
          # A fusion on another stream runs at its start.
          current.instructions[start.name] = dataclasses.replace(
            start, opcode='fusion', arrays=instruction.arrays
          )
          instruction = dataclasses.replace(instruction, opcode='bitcast')
        current.instructions[instruction.name] = instruction
        if found.group(1):
          current.root = instruction.name
  if not entry:
    raise ValueError('The text has no ENTRY computation: it is not an HLO module.')
  return Module(computations, entry, _sources(text))


def _instruction(name: str, text: str) -> Instruction:
  """Returns the instruction written as `TYPE opcode(operands), attributes`."""
  type_end = _matching(text, 0) + 1 if text.startswith('(') else text.index(' ')
  opcode, rest = text[type_end:].lstrip().split('(', 1)
  end = _matching('(' + rest, 0) - 1
  operands = split(rest[:end])
  if opcode != 'constant':  # with or without its type: `f32[4]{0} %x`
    operands = [operand.split(' ')[-1].lstrip('%') for operand in operands]
  arrays = tuple(
    Array(dtype, tuple(int(n) for n in shape.split(',') if n))
    for dtype, shape in _ARRAY.findall(text[:type_end])
  )
  return Instruction(name, opcode, arrays, tuple(operands), rest[end + 1 :])


def _element_instruction(computation: Computation, name: str) -> Instruction:
  """Returns the get-tuple-element that jaxlib 0.11 prints as `x#1`."""
  made, index = name.rsplit('#', 1)
  arrays = computation.instructions[made].arrays if made in computation.instructions else ()
  return Instruction(
    name, 'get-tuple-element', arrays[int(index) : int(index) + 1], (made,), f'index={index}'
  )


def _matching(text: str, start: int) -> int:
  """Returns the position of the bracket that closes the one at `start`."""
  depth = 0
  for found in re.compile(r'[()]').finditer(text, start):
    depth += 1 if found.group() == '(' else -1
    if not depth:
      return found.start()
  return len(text)


def split(text: str) -> list[str]:
  """Returns the parts of `text` between commas outside of brackets."""
  parts, depth, part = [], 0, ''
  for letter in text:
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and not depth:
      parts.append(part.strip())
      part = ''
    else:
      part += letter
  return [*parts, part.strip()] if part.strip() else parts


def _sources(text: str) -> dict[int, str]:
  """Returns stack frame id -> 'file:line', from the tables at the start of a module."""

  def table(title: str, pattern: str) -> Iterator[Sequence[str]]:
    section = re.search(rf'^{title}\n((?:\d+ .*\n)+)', text, re.MULTILINE)
    for line in section.group(1).splitlines() if section else ():
      found = re.match(r'(\d+) ' + pattern, line)
      if found:
        yield found.groups()

  files = dict(table('FileNames', r'"(.*)"'))
  lines = {
    number: f'{files.get(file, "")}:{line}'
    for number, file, line in table('FileLocations', r'\{file_name_id=(\d+).*? line=(\d+)')
  }
  return {
    int(number): lines.get(location, '')
    for number, location in table('StackFrames', r'\{file_location_id=(\d+)')
  }

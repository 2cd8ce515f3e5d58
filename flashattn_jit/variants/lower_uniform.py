"""What hooks compute from scalar params alone: once a launch, on the host, for CUDA.

Such a value is a field of ``Hooks::Uniforms``, which travels among the kernel's parameters: a
device reads it as an operand. Conversions of doubles, reciprocals and the magic numbers of integer
divisions cost a kernel nothing this way.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Uniforms:
    """The fields of ``Hooks::Uniforms``, and the statements that compute them."""

    fields: dict[str, str] = field(default_factory=dict)  # name -> C++ type
    lines: dict[str, str] = field(default_factory=dict)  # name -> expression, in order

    def compute(self, name: str, text: str) -> None:
        """State how `name` is computed, from scalar params and earlier names."""
        self.lines.setdefault(name, text)

    def read(self, name: str, kind: str) -> str:
        """The expression by which a kernel reads `name`, a value of C++ type `kind`."""
        self.fields[name] = kind
        return f"c.uniform<Uniforms>().{name}"

    def text(self) -> str:
        """``struct Uniforms`` and the function that fills it, which the host calls."""
        fields = "".join(f" {kind} {name};" for name, kind in self.fields.items())
        lines = "".join(
            f"    [[maybe_unused]] const auto {name} = {text};\n"
            for name, text in self.lines.items()
        )
        values = ", ".join(self.fields)
        return (
            f"  struct Uniforms {{{fields} }};\n"
            f"  FAJIT_FN static Uniforms uniforms([[maybe_unused]] const Context& c) {{\n{lines}"
            f"    return {{{values}}};\n  }}"
        )

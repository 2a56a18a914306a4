"""WHO: the arithmetic of ranks, and their process groups."""

from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh

__all__ = ["Layout", "Mesh"]

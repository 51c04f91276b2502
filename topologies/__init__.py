"""Topologies: role assignment and communication of a run, as pure data.

A topology is a module with a function `plan(nodes)`. From the node of every learner it makes the roles, with their
edges and their ranks. Fitting the plan to the ranks of a launcher is the same for all topologies (`Topology.fit`).
"""

from topologies.fitting import Topology, load, shipped
from topologies.plan import Plan, Role

__all__ = ["Plan", "Role", "Topology", "load", "shipped"]

"""Topologies: who is who and who talks to whom, as pure data.

A topology is a module with a function `plan(nodes)`: from the node of every learner it makes the roles, with their
edges and their places. Fitting the plan to the ranks that a launcher started is the same for all (`Topology.fit`).
"""

from topologies.fitting import Topology, load, shipped
from topologies.plan import Plan, Role

__all__ = ["Plan", "Role", "Topology", "load", "shipped"]

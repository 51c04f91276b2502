"""Topologies: who is who and who talks to whom, as pure data.

A topology is a module with two functions: `plan(learners)` places the roles on ranks, and
`learners_for(ranks)` says how many learners a launch of that many ranks leaves.
"""

from topologies.plan import Plan, Role, Topology, load, shipped

__all__ = ["Plan", "Role", "Topology", "load", "shipped"]

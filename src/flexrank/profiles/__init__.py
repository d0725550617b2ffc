"""Rank profiles, nested chains of them, and what a rank costs: frozen values that convert to and from JSON."""

from flexrank.profiles.chain import ChainEntry, Footprint, ProfileChain, RankProfile
from flexrank.profiles.sensitivity import SensitivityTable
from flexrank.profiles.slack import SlackTable

__all__ = ["ChainEntry", "Footprint", "ProfileChain", "RankProfile", "SensitivityTable", "SlackTable"]

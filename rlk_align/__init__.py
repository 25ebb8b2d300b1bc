"""rlk-align: are the rollout engine and the training engine the same policy?"""

__version__ = "0.1.0"

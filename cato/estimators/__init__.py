"""Predictors of lengths, speeds and stages. Pure models, trained on records."""

"""From the analyses to a plan: which edits give a family EPLB. Nothing is changed here."""

"""Does a step compute what one device computes?

In: a step and batches. Out: a `Verification`: what was compared, the first difference, its likely cause. Read first:
`compare`.
"""

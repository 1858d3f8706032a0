"""What a run's folder says of it, for people: its report, and a page that compares several.

facts          report.json: what the report needs beyond the logs, written when a run starts and when it ends
record         everything that the folder of a run says; no device is opened, and the run may be under way
figures        the figures of a run as a whole
renew          report.html from that
compare        several runs: their figures, and the keys in which their configs differ
"""

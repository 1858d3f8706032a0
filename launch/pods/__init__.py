"""Pods of Kubernetes: what is handed to the cluster, and how.

manifest       the objects: a config map, and a JobSet or an Indexed Job with its service
problems       what keeps a config from being launched there
pod            one pod: container, command, variables, volumes, and the config that it reads
names          names that Kubernetes takes
kubectl        the one command that talks to the cluster
"""

"""Identifiers. All are opaque strings; ties are broken by comparing them."""

from typing import NewType

TaskName = NewType("TaskName", str)
NodeId = NewType("NodeId", str)
RunId = NewType("RunId", str)
InvocationId = NewType("InvocationId", str)
ModelName = NewType("ModelName", str)
PoolName = NewType("PoolName", str)
DeploymentName = NewType("DeploymentName", str)
ReplicaId = NewType("ReplicaId", str)
HostId = NewType("HostId", str)

from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor
METRIC_FIELD_NUMBER: _ClassVar[int]
metric: _descriptor.FieldDescriptor
METRICS_FIELD_NUMBER: _ClassVar[int]
metrics: _descriptor.FieldDescriptor

class Metric(_message.Message):
    __slots__ = ("help", "name", "counter", "label", "keys", "value", "absent", "labels", "info")
    HELP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    help: str
    name: str
    counter: bool
    label: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    value: str
    absent: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    info: bool
    def __init__(self, help: _Optional[str] = ..., name: _Optional[str] = ..., counter: bool = ..., label: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., value: _Optional[str] = ..., absent: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., info: bool = ...) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("prefix", "label", "by", "several")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    label: str
    by: str
    several: bool
    def __init__(self, prefix: _Optional[str] = ..., label: _Optional[str] = ..., by: _Optional[str] = ..., several: bool = ...) -> None: ...

"""What TensorBoard's own reader finds in an event file, a line of JSON for each event."""

import json
import sys

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto.types_pb2 import DataType

for record in RawEventFileLoader(sys.argv[1]).Load():
    event = event_pb2.Event.FromString(record)
    told = {"what": event.WhichOneof("what"), "time": event.wall_time, "step": event.step}
    match told["what"]:
        case "file_version":
            told["version"] = event.file_version
        case "session_log":
            told["status"] = event.session_log.SessionStatus.Name(event.session_log.status)
        case "summary":
            told["values"] = []
            for value in event.summary.value:
                shown = {"tag": value.tag, "plugin": value.metadata.plugin_data.plugin_name}
                if value.WhichOneof("value") == "tensor":
                    tensor = value.tensor
                    shown |= {"kind": DataType.Name(tensor.dtype), "shaped": tensor.HasField("tensor_shape"), "dims": len(tensor.tensor_shape.dim), "texts": [text.decode() for text in tensor.string_val]}
                else:
                    shown["number"] = value.simple_value
                told["values"].append(shown)
    print(json.dumps(told))

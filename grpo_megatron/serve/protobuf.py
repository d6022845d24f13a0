"""The protobuf messages of the Tinker API, as far as the server reads or writes them.

They are made here, so that the server does not need the SDK. Fields that are left out are skipped when a
message is read. Enumerations are int32 here, and maps are lists of key and value: their bytes are the same.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# {message: its fields, each as `NAME TYPE NUMBER`; a list of a type is `TYPE*`}
_MESSAGES = {
    "EncodedTextChunk": "tokens bytes 1",
    "Chunk": "encoded_text EncodedTextChunk 1",
    "Tensor": "dense bytes 1, sparse_csr bytes 2, dtype int32 3, shape int64* 4",
    "NamedTensor": "key string 1, value Tensor 2",
    "Datum": "model_input Chunk* 1, loss_fn_inputs NamedTensor* 2",
    "LossConfigValue": "number double 1, text string 2",
    "NamedSetting": "key string 1, value LossConfigValue 2",
    "ForwardBackwardRequest": "model_id string 1, seq_id int32 2, data Datum* 3, loss_fn string 4, "
    "forward_only bool 6, loss_fn_config NamedSetting* 7",
    "BatchedTensor": "data bytes 1, offsets bytes 2, dtype int32 3, trailing_shape int64* 4",
    "NamedBatch": "key string 1, value BatchedTensor 2",
    "ArrayRecord": "type_tag string 1, fields NamedBatch* 2, num_datums int64 3",
    "NamedMetric": "key string 1, value double 2",
    "ForwardBackwardOutput": "loss_fn_output_type string 1, loss_fn_outputs ArrayRecord* 2, "
    "metrics NamedMetric* 3",
    "SampledSequence": "stop_reason int32 1, tokens bytes 2, logprobs bytes 3",
    "SampleResponse": "sequences SampledSequence* 1, prompt_logprobs bytes 2",
}
# Values of enumerations.
FLOAT32, INT64 = 1, 2
STOP, LENGTH = 0, 1

_Field = descriptor_pb2.FieldDescriptorProto


def _classes() -> dict[str, type]:
    """Return {message: its class}."""
    package = "grpo_megatron.serve"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for field in fields.split(", "):
            name, kind, number = field.split()
            added = described.field.add(name=name, number=int(number))
            added.label = _Field.LABEL_REPEATED if kind.endswith("*") else _Field.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind in _MESSAGES:
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                added.type = getattr(_Field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _classes()
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
SampleResponse = _CLASSES["SampleResponse"]

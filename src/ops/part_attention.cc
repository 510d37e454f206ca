#include "ops/part_attention.h"

namespace ferry::ops {

PartAttention* part_attention_of(Ops& ops) { return dynamic_cast<PartAttention*>(&ops); }

}  // namespace ferry::ops

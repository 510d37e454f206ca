#define FERRY_METHOD lion
#include "dispatch-inl.h"

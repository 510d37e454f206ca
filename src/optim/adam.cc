#define FERRY_METHOD adam
#include "dispatch-inl.h"

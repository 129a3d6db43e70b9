#pragma once

// The whole public interface.
#include "uniep/bfloat16.h"
#include "uniep/compile.h"
#include "uniep/error.h"
#include "uniep/exchange.h"
#include "uniep/group.h"
#include "uniep/layer.h"
#include "uniep/libraries.h"
#include "uniep/numerics.h"
#include "uniep/schedule.h"
#include "uniep/shape.h"
#include "uniep/tuner.h"
#include "uniep/verifier.h"
#include "uniep/version.h"

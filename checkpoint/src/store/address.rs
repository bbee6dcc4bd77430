//! From what a user writes to a store.

use std::env;
use std::path::{self, PathBuf};
use std::sync::Arc;

use object_store::ObjectStoreScheme;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use url::Url;

use super::Store;
use crate::{Error, Result};

pub(super) fn open(address: &str) -> Result<Store> {
    let bad = |reason: String| Error::Address { address: address.to_owned(), reason };
    let Some((_, _)) = address.split_once("://") else {
        return folder(path::absolute(address).map_err(|error| bad(error.to_string()))?, address);
    };
    let url = Url::parse(address).map_err(|error| bad(error.to_string()))?;
    let (scheme, _) = ObjectStoreScheme::parse(&url).map_err(|error| bad(error.to_string()))?;
    if scheme == ObjectStoreScheme::Local {
        return folder(url.to_file_path().map_err(|()| bad("it is no path of this machine".to_owned()))?, address);
    }
    if let Some(feature) = missing_feature(&scheme) {
        return Err(Error::FeatureOff { address: address.to_owned(), feature });
    }
    let (objects, prefix) = object_store::parse_url_opts(&url, settings()).map_err(|error| bad(error.to_string()))?;
    Ok(Store { objects: objects.into(), address: address.to_owned(), prefix, folder: None, timeout: Store::TIMEOUT })
}

fn folder(folder: PathBuf, address: &str) -> Result<Store> {
    let bad = |reason: String| Error::Address { address: address.to_owned(), reason };
    let prefix = Path::from_absolute_path(&folder).map_err(|error| bad(error.to_string()))?;
    let objects = Arc::new(LocalFileSystem::new().with_fsync(true));
    let address = folder.display().to_string();
    Ok(Store { objects, address, prefix, folder: Some(folder), timeout: Store::TIMEOUT })
}

/// Credentials and endpoints, from the variables that the services' own tools read.
fn settings() -> Vec<(String, String)> {
    let ours = |name: &str| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|prefix| name.starts_with(prefix));
    let variables = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let variables = variables.filter(|(name, _)| ours(name));
    let mut settings: Vec<_> = variables.filter_map(|(name, value)| Some((name, value.into_string().ok()?))).collect();
    // Whoever gives an endpoint without encryption means it.
    if settings.iter().any(|(name, value)| name.starts_with("AWS_ENDPOINT") && value.starts_with("http://")) {
        settings.push(("allow_http".to_owned(), "true".to_owned()));
    }
    settings
}

fn missing_feature(scheme: &ObjectStoreScheme) -> Option<&'static str> {
    match scheme {
        ObjectStoreScheme::AmazonS3 if cfg!(not(feature = "s3")) => Some("s3"),
        ObjectStoreScheme::GoogleCloudStorage if cfg!(not(feature = "gcs")) => Some("gcs"),
        ObjectStoreScheme::MicrosoftAzure if cfg!(not(feature = "azure")) => Some("azure"),
        _ => None,
    }
}
